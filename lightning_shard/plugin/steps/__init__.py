"""The user's steps: once, or per microbatch, and what comes of them on every rank."""
