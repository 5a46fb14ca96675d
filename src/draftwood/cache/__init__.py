"""Pages and what is in them."""
