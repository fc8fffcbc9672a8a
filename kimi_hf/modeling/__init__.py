"""The models: mixers, feed-forwards and residual streams, put together by one decoder."""
