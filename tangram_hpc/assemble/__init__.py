"""Wiring: the only room that knows which filling goes into which hole.

Law: no behaviour of its own beyond putting parts together, starting them and ending them in order.
"""
