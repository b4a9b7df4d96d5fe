"""Curves of policies as SVG, and as PNG where matplotlib is installed.

The modules draw the values that they are given. They compute no metrics and print nothing.
"""
