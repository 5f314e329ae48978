"""The result pages: Markdown templates, and the figures to fill them."""
