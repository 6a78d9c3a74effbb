"""A foreign model, adapted: its attention reads pages, its state is known, its decoding steps are
captured.
"""
