"""The plug: stock generate() on pages."""
