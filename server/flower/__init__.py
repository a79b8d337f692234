"""The fleet of Flower's nodes, and the experiment as a Flower app."""
