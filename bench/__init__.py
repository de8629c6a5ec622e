"""What the library costs and how soon it notices, measured beside a baseline. See README.md."""
