"""Database (SQLAlchemy, Alembic) and object store (S3 or a folder)."""
