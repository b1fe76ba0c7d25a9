"""The whole coordinator: the tables that came after the spine, one block each."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

VAULT_SECRETS = (
    """CREATE TABLE vault_secrets (
        "key" TEXT NOT NULL,
        subject TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        ciphertext BLOB NOT NULL,
        expires_at BIGINT,
        PRIMARY KEY ("key")
    )""",
    "CREATE INDEX vault_secrets_by_subject ON vault_secrets (subject)",
)

STATEMENTS = (*VAULT_SECRETS,)


def upgrade() -> None:
    """Adds them."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Refuses: history is kept."""
    raise NotImplementedError("restore a backup made before")
