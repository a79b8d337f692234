"""The coordinator: who trains when, what counts, what is kept."""
