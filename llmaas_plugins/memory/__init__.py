"""One memory budget for all plugins, divided by the time that memory saves."""
