// Adds up the orders of each shop and hour, and sends each sum once, when the hour is over.
import java.time.Duration;
import java.time.Instant;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.Suppressed;
import org.apache.kafka.streams.kstream.TimeWindows;
import tools.jackson.databind.json.JsonMapper;import tools.jackson.databind.json.JsonMapper;

class Hours {
    record Order(String shop, long cents, Instant placed) {}

    record Hour(Instant windowStart, String shop, long cents) {}

    static <T> Serde<T> json(Class<T> type) {
        var json = new JsonMapper();
        return Serdes.serdeFrom((topic, row) -> json.writeValueAsBytes(row), (topic, row) -> json.readValue(row, type));
    }

    static Topology topology() {
        var builder = new StreamsBuilder();
        builder.stream("orders", Consumed.with(Serdes.String(), json(Order.class))
                .withTimestampExtractor((record, before) -> ((Order) record.value()).placed().toEpochMilli()))
            .groupBy((id, order) -> order.shop(), Grouped.with(Serdes.String(), json(Order.class)))
            .windowedBy(TimeWindows.ofSizeAndGrace(Duration.ofHours(1), Duration.ofMinutes(10)))
            .aggregate(() -> 0L, (shop, order, sum) -> sum + order.cents(),
                Materialized.with(Serdes.String(), Serdes.Long()))
            .suppress(Suppressed.untilWindowCloses(Suppressed.BufferConfig.unbounded()))
            .toStream()
            .map((hour, cents) -> KeyValue.pair(hour.key(), new Hour(hour.window().startTime(), hour.key(), cents)))
            .to("per_hour", Produced.with(Serdes.String(), json(Hour.class)));
        return builder.build();
    }

    public static void main(String[] args) {
        var config = new Properties();
        config.putAll(Map.of("application.id", "hours", "bootstrap.servers", "broker:9092"));
        config.put("processing.guarantee", "exactly_once_v2");
        new KafkaStreams(topology(), config).start();
    }
}
