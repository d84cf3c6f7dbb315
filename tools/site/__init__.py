"""Builds the documentation site: the pages of ``docs``, and a reference, source listings and index made of the source.

Everything here but the last step needs Python alone: neither torch nor mkdocs is imported, so that the site is built in
a small environment of its own and its pages are checked by tests where mkdocs is not installed.
"""
