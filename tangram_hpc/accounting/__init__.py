"""Pure. Accounting is a fold over the journal's events: who used what of what was held."""
