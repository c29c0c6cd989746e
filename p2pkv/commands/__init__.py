"""The commands of ``p2pkv``: one module for each family. Nothing here is imported elsewhere."""
