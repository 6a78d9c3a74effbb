"""Pictures, recordings, embeddings and encoders."""
