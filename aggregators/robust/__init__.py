"""Byzantine-robust rules, which need the single messages of a round."""
