"""Cancel tokens for engines of others; each module imports its one framework."""
