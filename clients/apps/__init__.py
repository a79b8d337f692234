"""Apps: clients that train with code of their own, in any framework, Flower's among them."""
