"""audits of groups, and what they say of nodes"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

COUNTS = ("audits", "audits_passed", "audit_failures")
SUMS = ("audit_drift", "audit_surprise", "audit_variance", "audit_spread", "audit_jump", "audit_excess")
VALUES = ("audit_rms", "audit_kl", "quarantined_at")


def upgrade() -> None:
    """Go to this revision: audits of groups, and what they say of nodes."""
    op.create_table(
        "audits",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("work_item", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("fault", sa.String(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("rms", sa.Double(), nullable=False),
        sa.Column("kl", sa.Double(), nullable=False),
        sa.Column("reward_ok", sa.Boolean(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_audits_job_id_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audits")),
        sa.UniqueConstraint("node_id", "work_item", name=op.f("uq_audits_node_id")),
    )
    op.create_index(op.f("ix_audits_job_id"), "audits", ["job_id"])
    for name in COUNTS:
        op.add_column("nodes", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    for name in SUMS:
        op.add_column("nodes", sa.Column(name, sa.Double(), nullable=False, server_default="0"))
    for name in VALUES:
        op.add_column("nodes", sa.Column(name, sa.Double(), nullable=True))
    op.add_column("nodes", sa.Column("caught", sa.Text(), nullable=True))


def downgrade() -> None:
    """Go back to the revision before; what only this one holds is lost."""
    for name in ("caught", *reversed(VALUES), *reversed(SUMS), *reversed(COUNTS)):
        op.drop_column("nodes", name)
    op.drop_index(op.f("ix_audits_job_id"), "audits")
    op.drop_table("audits")
