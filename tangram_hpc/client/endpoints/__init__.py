"""A client's calls of external APIs, within the quota that the broker grants.

Here are endpoints, the turns that ask for a slot and a token, the pacing of granted starts, and the
rule that reads an HTTP answer. No HTTP library is imported; the caller makes the call.
"""
