"""One promise on an app's whole set, one request at a time: figures of ElastiLM without a queue."""
