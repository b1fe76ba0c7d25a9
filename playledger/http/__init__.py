"""The HTTP face: an ASGI app over a ledger, mountable in others (UX section 6).

It translates and refuses; what a command may do is decided by the writer alone.
"""
