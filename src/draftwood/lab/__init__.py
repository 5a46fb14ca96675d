"""The laboratory of acceptance laws: what each law gives on rows of real models."""
