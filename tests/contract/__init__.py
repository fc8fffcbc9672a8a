"""What every model class of this package promises to a transformers user, checked on tiny models of each kind."""
