"""What is written down and told of what is being done."""
