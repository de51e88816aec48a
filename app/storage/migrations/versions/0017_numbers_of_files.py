"""numbers of trajectory files are never given twice; those with held-out answers are found without a scan"""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision: SQLite gave a file the number of the last one when that was removed, and a learner that had
    read so far never asked for it. PostgreSQL's sequence never did."""
    _rebuild(autoincrement=True)
    op.create_index(op.f("ix_trajectories_heldout"), "trajectories", ["heldout"])


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_index(op.f("ix_trajectories_heldout"), "trajectories")
    _rebuild(autoincrement=False)


def _rebuild(*, autoincrement: bool) -> None:
    if op.get_bind().dialect.name == "sqlite":
        how = {"sqlite_autoincrement": autoincrement}
        with op.batch_alter_table("trajectories", recreate="always", table_kwargs=how):
            pass
