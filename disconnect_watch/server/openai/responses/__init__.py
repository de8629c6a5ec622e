"""``/v1/responses``: responses that can be kept, left, found again and cancelled."""
