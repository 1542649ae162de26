"""The repos that are watched and published to: local folder, S3/R2, Hugging Face."""
