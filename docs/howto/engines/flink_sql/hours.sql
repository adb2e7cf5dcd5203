-- Adds up the orders of each shop and hour, and sends each sum once, when the hour is over.
SET 'execution.checkpointing.interval' = '1 s';
CREATE TABLE orders (
  shop STRING, cents BIGINT, placed TIMESTAMP_LTZ(3), WATERMARK FOR placed AS placed - INTERVAL '10' MINUTE) WITH (
  'connector' = 'kafka', 'topic' = 'orders', 'properties.bootstrap.servers' = 'broker:9092',
  'scan.startup.mode' = 'earliest-offset', 'format' = 'json', 'json.timestamp-format.standard' = 'ISO-8601');
CREATE TABLE per_hour (window_start TIMESTAMP(3), shop STRING, cents BIGINT) WITH (
  'connector' = 'kafka', 'topic' = 'per_hour', 'properties.bootstrap.servers' = 'broker:9092',
  'key.format' = 'raw', 'key.fields' = 'shop', 'value.format' = 'json',
  'sink.delivery-guarantee' = 'exactly-once', 'sink.transactional-id-prefix' = 'per-hour',
  'properties.transaction.timeout.ms' = '600000');
INSERT INTO per_hour
SELECT window_start, shop, SUM(cents) FROM TUMBLE(TABLE orders, DESCRIPTOR(placed), INTERVAL '1' HOUR)
GROUP BY window_start, window_end, shop;
