"""The keeper: one small program per home that parents every agent process, and outlives the manager.

Standard library only, single-threaded, and nothing in here imports the rest of Ostler: what lives for weeks beside
other people's work must be small, start in milliseconds and hold no secret.
"""
