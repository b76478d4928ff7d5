"""For every test: no property has a deadline. How long an example takes says only how busy the machine is."""

from hypothesis import settings

settings.register_profile("pdconsole", deadline=None)
settings.load_profile("pdconsole")
