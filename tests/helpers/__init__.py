"""Rigs, fakes and builders that several test files share.

Each module says in its head what it gives.
"""
