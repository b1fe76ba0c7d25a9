"""What the log means: pure folds, the read models they fill, and how these are rebuilt.

Every read model here changes in the append transaction, so a status read is one indexed row and
never stale.  All of it may be deleted and rebuilt from the log.
"""
