"""What several tests build, fake and start; a test file reads as what it proves."""
