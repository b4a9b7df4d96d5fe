def add(verbs): pass
