"""What a request may say, declared once."""
