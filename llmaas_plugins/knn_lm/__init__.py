"""Next-token mixing with a small, well-chosen datastore of the user's past chats."""
