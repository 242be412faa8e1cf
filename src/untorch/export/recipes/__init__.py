"""Recipes: Hugging Face folders of each task into packages that ``untorch.pipeline`` runs. ``table.py`` lists them."""
