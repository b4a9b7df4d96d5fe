"""Checks of a node, one subject a file; `checkup` lists them, `verdict` weighs them."""
