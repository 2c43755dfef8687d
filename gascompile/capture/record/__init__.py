"""What a capture depended on and changed, and whether that still holds."""
