"""The table of attacks: attackers times assets, filled by the tests that carry the mark `attack`.

`docs/SECURITY.md` shows the table, and CONTRIBUTING.md says how to add an attack.
"""
