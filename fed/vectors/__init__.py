"""Algebra on one flat vector: tensors, random streams, layout, exact sums, mixing."""
