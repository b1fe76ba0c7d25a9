"""What happened: events, their envelope and bytes, the log that keeps them, and the vault.

Authoritative for everything else in the project.  Events are appended in group commits by one
writer thread per process (writer.py, transaction.py); acknowledged means durable.  Everything but
the `events` and `vault` tables can be deleted and is rebuilt from them.
"""
