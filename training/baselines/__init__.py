"""What a trained tree is compared with."""
