"""What a model's configuration says: parsed, resolved, normalised, validated and printed."""
