"""A client's calls of external APIs, within the quota that the broker grants.

The package holds endpoints, the requests for a slot and a token, this process's own rate limit, and
the rule that decides from an HTTP answer whether to retry. It imports no HTTP library: the caller
makes the call.
"""
