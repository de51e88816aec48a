"""what a step was made from, and how old a group was when it was dropped"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0004"
branch_labels = None
depends_on = None

COLUMNS = ("trained_position", "replay_step", "drop_lag")


def upgrade() -> None:
    """Go to this revision: what a step was made from, and how old a group was when it was dropped."""
    for name in COLUMNS:
        op.add_column("work_items", sa.Column(name, sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    for name in reversed(COLUMNS):
        op.drop_column("work_items", name)
