"""Reports of runs and comparisons: tables, charts, conclusions and an HTML page."""
