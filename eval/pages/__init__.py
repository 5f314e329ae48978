"""The pages of the results: templates in Markdown, and the figures that are put into them."""
