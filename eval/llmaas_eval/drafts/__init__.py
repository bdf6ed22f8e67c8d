"""The evaluation of drafts by a narrow level that memory keeps."""
