"""What `dtorch.compile` is made of; docs/architecture.md has the idea."""
