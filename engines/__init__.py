"""How it is done: engines that run instances, behind the protocol in handlers/engine.py."""
