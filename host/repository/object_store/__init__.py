"""Model repositories in object stores: S3, Google Cloud Storage and Azure Blob Storage."""
